"""Types that ops, graphs and the runtime share: symbolic sizes, input specs, and the reading of nodes."""
