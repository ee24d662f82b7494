"""``strandline``, and ``python -m strandline``."""

import sys


def main() -> int:
    """Import the command line, which takes a while, and run it; return the exit code."""
    try:
        from strandline import cli
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
