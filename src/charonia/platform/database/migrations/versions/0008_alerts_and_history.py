"""Models that follow a branch, limits of the API keys of servers, alerts, figures over days, and the lease.

New tables are made as the code has them: a later migration that changes one of them keeps its former columns here.
"""

import sqlalchemy as sa
from alembic import op

from charonia.platform.database.tables import AlertEventRow, AlertRow, HistoryRow, LeaseRow, PlatformTable

revision = "0008"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the change."""
    with op.batch_alter_table("models") as table:
        table.add_column(sa.Column("follows", sa.JSON(), nullable=False, server_default="{}"))
    with op.batch_alter_table("server_keys") as table:
        for name in ("requests_per_minute", "tokens_per_minute"):
            table.add_column(sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    made = [PlatformTable.metadata.tables[row.__tablename__] for row in (AlertRow, AlertEventRow, HistoryRow, LeaseRow)]
    PlatformTable.metadata.create_all(op.get_bind(), made)
