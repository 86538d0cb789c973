"""Charts as SVG: curves over steps, and points over values, alone on a sheet or within a page.

``scale`` places values along an axis, ``frame`` draws the two axes, ``chart`` the curves between them, which ``curve``
thins; ``sheet`` lays charts out as one picture.

Imports: errors, files.
"""
