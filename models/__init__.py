"""Model families and embedded models of dgraph, found through the entry-point group `dgraph.models`."""
