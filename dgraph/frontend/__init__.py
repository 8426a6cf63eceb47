"""From a module to a verified graph: capture, canonical form, and captures stored between processes."""
