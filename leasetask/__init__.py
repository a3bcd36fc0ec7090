"""Durable tasks in your own PostgreSQL."""
