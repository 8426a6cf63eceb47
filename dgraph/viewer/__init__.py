"""Browser pages of denoising runs and of graphs. No build step, and nothing from another host.

`files/` has the pages' parts as a browser takes them; `dgraph.serve` serves that folder as it is, and `page` makes one
self-contained file of some of them. `run` defines a run for Python and for the scripts alike.
"""

from dgraph.viewer.page import FILES, page
from dgraph.viewer.run import Run, Step, Token, page_of

__all__ = ["FILES", "Run", "Step", "Token", "page", "page_of"]
