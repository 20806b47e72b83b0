"""``python -m lik_ops``: list the programs of this package."""

from __future__ import annotations

import argparse

from . import __version__

PROGRAMS = {
    "info": "print versions, devices, and the backend and kernel of a call on each",
    "warmup": "compile kernels before the first request",
    "opcheck": "check every operator against this build of torch",
}


def main(argv: list[str] | None = None) -> None:
    """Print the programs of this package."""
    rows = [f"  python -m lik_ops.{name:8} {text}" for name, text in PROGRAMS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m lik_ops",
        usage="python -m lik_ops.PROGRAM [options]",
        description=f"lik_ops {__version__}, MaxSim as PyTorch operators. Each program has --help.",
        epilog="\n".join(["programs:", *rows]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    parser.print_help()


if __name__ == "__main__":
    main()
