"""plpgsql bodies are checked when they run, so a wrong column may hide: plpgsql_check looks at all."""

from __future__ import annotations

import psycopg
import pytest

FINDINGS = """
select p.proname, f.lineno, f.level, f.message, f.detail
from pg_proc p
join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'
join pg_namespace n on n.oid = p.pronamespace and n.nspname = 'leasetask'
cross join lateral plpgsql_check_function_tb(
  p.oid, performance_warnings => true, extra_warnings => true, security_warnings => true) f
"""


def test_plpgsql_check_finds_nothing(db: psycopg.Connection) -> None:
    try:
        db.execute("create extension plpgsql_check")
    except (psycopg.errors.UndefinedFile, psycopg.errors.FeatureNotSupported):
        pytest.skip("plpgsql_check is not installed on this server")
    found = db.execute(FINDINGS).fetchall()
    # `take` reads and locks: the checker does not count a row lock as a side effect.
    # `list` puts together a query out of its own constants; every value is a parameter.
    allowed = {("take", "performance"), ("list", "security")}
    assert [f for f in found if (f[0], f[2]) not in allowed] == []
