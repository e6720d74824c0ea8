"""Makes the manual's reference pages from the program itself: settings, commands, HTTP operations, errors.

`make docs` makes them while it builds (`tools.manual.hooks`); `python -m tools.manual FOLDER` writes them to look at.
"""
