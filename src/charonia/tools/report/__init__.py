"""What people and programs read of a measurement: tables, CSV, JSON files, HTML, comparison, progress."""
