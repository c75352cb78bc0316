"""Models that follow a branch."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the change."""
    with op.batch_alter_table("models") as table:
        table.add_column(sa.Column("follows", sa.JSON(), nullable=False, server_default="{}"))
