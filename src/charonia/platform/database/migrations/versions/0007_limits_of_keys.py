"""Limits of the API keys of servers.

Revision ID: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_COLUMNS = ("requests_per_minute", "tokens_per_minute")


def upgrade() -> None:
    """Apply the change."""
    with op.batch_alter_table("server_keys") as table:
        for name in _COLUMNS:
            table.add_column(sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
