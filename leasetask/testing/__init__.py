"""Tools for testing handlers on a real PostgreSQL."""
