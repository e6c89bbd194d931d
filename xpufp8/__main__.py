"""``python -m xpufp8``."""

from xpufp8.cli import main

main()
