"""Writes a migration for what has changed in the platform's tables: tools/migration.py MESSAGE.

With `--first`, it writes the first one anew in place of all others, for tables that nobody has yet.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.config import Config

from charonia.platform.database import migrations
from charonia.platform.database.connection import Database

FOLDER = Path(migrations.__file__).parent


def main() -> None:
    """Write the migration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("message")
    parser.add_argument("--first", action="store_true")
    given = parser.parse_args()
    if given.first:
        for file in (FOLDER / "versions").glob("*.py"):
            file.unlink()
    count = len(list((FOLDER / "versions").glob("*.py")))
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/database")
        database.migrate()
        config = Config()
        config.set_main_option("script_location", str(FOLDER))
        with database.engine.begin() as connection:
            config.attributes["connection"] = connection
            command.revision(config, given.message, autogenerate=True, rev_id=f"{count + 1:04}")
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(FOLDER)], check=True)
    subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--fix", str(FOLDER)], check=True)


if __name__ == "__main__":
    main()
