"""One reader per public data source."""
