"""`python -m dgraph`."""

from dgraph.cli import main

main()
