"""Reports of a measurement for people and programs: tables, CSV, JSON files, HTML, comparison, progress."""
