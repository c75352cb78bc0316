"""Alerts, figures over days, and the lease.

Revision ID: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the change."""
    op.create_table(
        "alerts",
        sa.Column("project_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("condition", sa.String(length=16), nullable=False),
        sa.Column("deployment", sa.String(length=128), nullable=False),
        sa.Column("threshold", sa.Double(), nullable=False),
        sa.Column("for_s", sa.Integer(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(length=128), nullable=False),
        sa.Column("format", sa.String(length=16), nullable=False),
        sa.Column("any_host", sa.Boolean(), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_alerts_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_alerts_project_id_name")),
    )
    op.create_table(
        "alert_events",
        sa.Column("alert_id", sa.Integer(), nullable=False),
        sa.Column("subject", sa.String(length=256), nullable=False),
        sa.Column("open", sa.String(length=256), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=False),
        sa.Column("acknowledged_by", sa.String(length=128), nullable=False),
        sa.Column("unsent", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next", sa.Double(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["alert_id"], ["alerts.id"], name=op.f("fk_alert_events_alert_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_events")),
        sa.UniqueConstraint("alert_id", "open", name=op.f("uq_alert_events_alert_id_open")),
    )
    op.create_table(
        "history",
        sa.Column("deployment_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("is_busy", sa.Boolean(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name=op.f("fk_history_deployment_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_history")),
    )
    op.create_index("ix_history_deployment_id_step_created", "history", ["deployment_id", "step", "created"])
    lease = op.create_table(
        "lease",
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease")),
    )
    op.bulk_insert(lease, [{"holder": "", "until": 0.0, "created": 0.0}])
