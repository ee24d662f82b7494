"""What flags of the command line do with their values."""

import argparse
from typing import Any


class Extend(argparse.Action):
    """Adds values to those of the same flag before; argparse's own needs a list as the default."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *values])
