"""Tables, migrations, transactions."""
