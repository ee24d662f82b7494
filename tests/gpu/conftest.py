"""What all tests on a GPU share."""

import os

from strandline.env import COMPILE_AHEAD

os.environ.setdefault(COMPILE_AHEAD, "0")  # an engine launches a few of the kernels that its start would compile
