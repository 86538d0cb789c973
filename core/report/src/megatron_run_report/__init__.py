"""Reports: what one run or two were, on one page that needs nothing else, or as a table.

``thinned`` reads curves of any length in bounded memory, ``record`` all that a run folder tells, ``numbers`` compares
runs, ``drawing`` makes pictures, and ``page`` the HTML. Whatever a run folder holds is data: nothing in it runs, and
every text of it is escaped.
"""

from __future__ import annotations
