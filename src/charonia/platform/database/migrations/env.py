"""Run by Alembic for each migration, on the connection of `database.connection`."""

from alembic import context

from charonia.platform.database.tables import PlatformTable

connection = context.config.attributes["connection"]
context.configure(
    connection=connection, target_metadata=PlatformTable.metadata, render_as_batch=True, compare_type=True
)
with context.begin_transaction():
    context.run_migrations()
