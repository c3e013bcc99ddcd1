"""Text-to-SQL: questions with reference queries, and the database that the queries describe.

The data has no tables. Names come from the reference queries: a table has every column that a query
asks it for. The tables are empty, so a query can be compiled but not compared by its rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

FILE = "prompts/defog_sql_sqlite.csv.gz"
WORD = r"[A-Za-z_]\w*"
SOURCE = re.compile(rf"\b(?:FROM|JOIN)\s+({WORD})(?:\s+(?:AS\s+)?({WORD}))?", re.IGNORECASE)
DERIVED = re.compile(rf"(?:\)\s+AS|\bWITH|,)\s+({WORD})\b(?!\.)", re.IGNORECASE)  # no table
COLUMN = re.compile(rf"\b({WORD})\.({WORD})")
NO_COLUMN = re.compile(rf"no such column: (?:({WORD})\.)?({WORD})")
NO_TABLE = re.compile(rf"no such table: ({WORD})")
KEYWORDS = {"on", "where", "join", "left", "group", "order", "limit", "inner", "cross", "union"}
MAX_REPAIRS = 40  # names that are added until a reference query compiles


@dataclass
class Database:
    """The tables of one database: name -> columns."""

    name: str
    tables: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    def learn(self, query: str) -> None:
        """Adds the tables and columns that a query names, until SQLite compiles it."""
        owners: dict[str, str] = {}  # table of each name that stands for one
        derived = {name.lower() for name in DERIVED.findall(query)} if "(SELECT" in query else set()
        for table, alias in SOURCE.findall(query):
            if table.lower() not in derived:
                owners[table.lower()] = table.lower()
                if alias and alias.lower() not in KEYWORDS:
                    owners[alias.lower()] = table.lower()
        for owner, column in COLUMN.findall(query):
            if owner.lower() in owners:
                self.tables[owners[owner.lower()]][column.lower()] = None
        for _ in range(MAX_REPAIRS):
            if not self._repair(self.problem(query), owners):
                return

    def _repair(self, problem: str, owners: dict[str, str]) -> bool:
        """Adds the name that SQLite misses; returns whether the problem was a missing name."""
        if found := NO_TABLE.search(problem):
            self.tables[found.group(1).lower()]["id"] = None
        elif found := NO_COLUMN.search(problem):
            owner = owners.get((found.group(1) or next(iter(owners), "")).lower())
            if owner is None or found.group(2).lower() in self.tables[owner]:
                return False
            self.tables[owner][found.group(2).lower()] = None
        return found is not None

    @property
    def script(self) -> str:
        """CREATE TABLE statements."""
        return "\n".join(
            f"CREATE TABLE {table} ({', '.join(columns) or 'id'});"
            for table, columns in sorted(self.tables.items())
        )

    def problem(self, query: str) -> str:
        """What SQLite says against a query; "" if it compiles it."""
        connection = sqlite3.connect(":memory:")
        try:
            connection.executescript(self.script)
            connection.execute(f"EXPLAIN {query}")
        except sqlite3.Error as error:
            return str(error)
        finally:
            connection.close()
        return ""

    def grammar(self, template: str) -> str:
        """The Lark grammar of SELECT statements over these names."""
        columns = sorted({c for columns in self.tables.values() for c in columns} or {"id"})
        return f"{template}TABLE: {_either(sorted(self.tables))}\nCOLUMN: {_either(columns)}\n"


def _either(names: list[str]) -> str:
    return " | ".join(f'"{name}"' for name in names)


@dataclass(frozen=True)
class Question:
    """A question, its database, and the first reference query."""

    text: str
    database: Database
    reference: str


def questions(data: Path) -> list[Question]:
    """All questions of the file."""
    with gzip.open(data / FILE) as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))
    databases: dict[str, Database] = {}
    found = []
    for row in rows:
        name = row["db_name"]
        database = databases.setdefault(name, Database(name))
        queries = [query.strip() for query in row["query"].split(";") if query.strip()]
        for query in queries:
            database.learn(query)
        found.append(Question(row["question"], database, f"{queries[0]};"))
    return found
