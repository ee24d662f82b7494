"""What the serving benchmark's tests share: flags as a user gives them."""

from argparse import Namespace

from strandline.cli import build_parser


def serve_options(*flags: str) -> Namespace:
    """Return what ``strandline bench serve`` makes of flags."""
    options: Namespace = build_parser().parse_args(["bench", "serve", *flags])
    return options
