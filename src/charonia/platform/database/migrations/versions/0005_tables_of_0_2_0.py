"""The tables of 0.2.0, the first release, whose databases are migrated from here. New ones are made of the classes."""

revision = "0005"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing comes before: see `Database.migrate`."""
