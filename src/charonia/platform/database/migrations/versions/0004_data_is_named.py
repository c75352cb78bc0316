"""Versions whose formats are programs need the permission to run code, including existing ones.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

DATA = ("armnn_tflite", "ensemble", "fil", "identity", "image", "llama_cpp", "onnxruntime", "openvino", "tflite", "")
"""Backends whose versions remain data until they are checked again."""


def upgrade() -> None:
    """Mark the versions of all other backends."""
    versions = sa.table("versions", sa.column("backend", sa.String), sa.column("runs_code", sa.Boolean))
    op.execute(versions.update().where(versions.c.backend.not_in(DATA)).values(runs_code=True))


def downgrade() -> None:
    """Keep the marks: earlier values are unknown."""
