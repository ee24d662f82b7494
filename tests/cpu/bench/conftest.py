"""What the serving benchmark's tests share: a server of the demo model, and flags as a user gives them."""

from argparse import Namespace

from strandline.cli import build_parser
from tests.cpu.server.conftest import demo_server

__all__ = ["demo_server", "serve_options"]


def serve_options(*flags: str) -> Namespace:
    """Return what ``strandline bench serve`` makes of flags."""
    options: Namespace = build_parser().parse_args(["bench", "serve", *flags])
    return options
