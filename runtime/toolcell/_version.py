"""Version and folder of the package, for modules of it: they must not import the package that imports them."""

import os

__version__ = "0.1.0"

FOLDER = os.path.dirname(__file__)
