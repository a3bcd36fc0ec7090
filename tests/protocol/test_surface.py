"""The SQL surface stands in surface.txt, so that a protocol change shows as a diff.

To record a change that is meant: LEASETASK_RECORD=1 pytest tests/protocol/test_surface.py
"""

from __future__ import annotations

import os
from pathlib import Path

import psycopg

SURFACE = Path(__file__).parent / "surface.txt"

FUNCTIONS = """
select format('function %s(%s) returns %s %s', p.proname, pg_get_function_arguments(p.oid),
  pg_get_function_result(p.oid), case p.provolatile when 'i' then 'immutable' when 's' then 'stable'
  else 'volatile' end)
from pg_proc p join pg_namespace n on n.oid = p.pronamespace where n.nspname = 'leasetask' order by 1
"""
COLUMNS = """
select format('column %s.%s %s%s', c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
  case when a.attnotnull then ' not null' else '' end)
from pg_attribute a join pg_class c on c.oid = a.attrelid join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'leasetask' and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
order by c.relname, a.attnum
"""
CONSTRAINTS = """
select format('constraint %s.%s', c.relname, k.conname)
from pg_constraint k join pg_class c on c.oid = k.conrelid join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'leasetask' and k.contype <> 'n' order by 1
"""
INDEXES = """
select format('index %s', indexdef) from pg_indexes where schemaname = 'leasetask' order by 1
"""


def test_the_surface_is_as_recorded(db: psycopg.Connection) -> None:
    db.execute("set search_path = pg_catalog")
    queries = (FUNCTIONS, COLUMNS, CONSTRAINTS, INDEXES)
    found = "".join(f"{row[0]}\n" for query in queries for row in db.execute(query).fetchall())
    if os.environ.get("LEASETASK_RECORD"):
        SURFACE.write_text(found)
    assert found == SURFACE.read_text()
