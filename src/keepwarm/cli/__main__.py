"""`python -m keepwarm.cli` is `keepwarm`."""

from __future__ import annotations

from keepwarm.cli.app import main

if __name__ == "__main__":
    main()
