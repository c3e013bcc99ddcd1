"""Checks of molecules as SMILES strings: brackets, rings, and valences of atoms."""

from __future__ import annotations

import re

ATOM = re.compile(r"\[[^\]]*\]|Cl|Br|[CNOSFcn]|[=#()]|1")
VALENCE = {"C": 4, "N": 3, "O": 2, "S": 6, "F": 1, "Cl": 1, "Br": 1}
AROMATIC = {"c": 4, "n": 3}  # with half a bond more to each neighbour in the ring


def is_closed(text: str) -> bool:
    """Whether a text has atoms only, with all branches and rings closed."""
    depth = 0
    for part in (parts := ATOM.findall(text)):
        depth += (part == "(") - (part == ")")
        if depth < 0:
            return False
    return bool(text) and "".join(parts) == text and depth == 0 and parts.count("1") % 2 == 0


def has_valid_valences(text: str) -> bool:
    """Whether no atom outside brackets has more bonds than its valence."""
    if not is_closed(text):
        return False
    bonds: list[float] = []  # by atom
    atoms: list[str] = []
    last: list[int] = [-1]  # the atom before, for each open branch
    order, ring = 1.0, -1

    def bind(one: int, other: int, order: float) -> None:
        if atoms[one] in AROMATIC and atoms[other] in AROMATIC:
            order = 1.5 if atoms[one] == atoms[other] == "c" else 1.0
        bonds[one] += order
        bonds[other] += order

    for part in ATOM.findall(text):
        if part == "(":
            last.append(last[-1])
        elif part == ")":
            last.pop()
        elif part in "=#":
            order = {"=": 2.0, "#": 3.0}[part]
        elif part == "1":
            if ring < 0:
                ring = last[-1]
            else:
                bind(ring, last[-1], 1.0)
                ring = -1
        else:
            atoms.append(part)
            bonds.append(0.0)
            if last[-1] >= 0:
                bind(last[-1], len(atoms) - 1, order)
            last[-1], order = len(atoms) - 1, 1.0
    limits = VALENCE | AROMATIC
    return all(b <= limits.get(a, 4) for a, b in zip(atoms, bonds, strict=True))
