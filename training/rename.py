"""Word problems about other people: the first names that occur are replaced, each by one of the same gender.

A model that is asked one problem many times knows it by its names, and then learns nothing about others.
"""

from __future__ import annotations

import random
import re

HE = (
    *("Adam", "Andrew", "Andy", "Ben", "Bill", "Billy", "Bob", "Bobby", "Brian", "Carl", "Carlos", "Dave", "David"),
    *("Fred", "George", "Greg", "Harry", "Henry", "Jack", "Jacob", "Jake", "James", "Jason", "Jeff", "Jeremy", "Jerry"),
    *("Jim", "Jimmy", "Joe", "John", "Johnny", "Joseph", "Josh", "Ken", "Kevin", "Kyle", "Leo", "Marcus", "Matt"),
    *("Michael", "Mike", "Oliver", "Paul", "Pete", "Peter", "Randy", "Rick", "Robert", "Roger", "Ryan", "Samuel"),
    *("Simon", "Steve", "Thomas", "Tim", "Tom", "Tommy", "Tony", "William"),
)
SHE = (
    *("Alice", "Amanda", "Amy", "Anna", "Annie", "Beth", "Betty", "Carla", "Carrie", "Emily", "Gina", "Hannah", "Jane"),
    *("Janet", "Jenna", "Jenny", "Jessica", "Jill", "Julia", "Julie", "Karen", "Kate", "Katie", "Kim", "Lily", "Lisa"),
    *("Lucy", "Mandy", "Maria", "Martha", "Mary", "Monica", "Nancy", "Rachel", "Sally", "Sara", "Sarah", "Susan"),
    *("Tina",),
)
"""First names that are no other words."""
STAYS = 0.2
"""Chance that one stays."""
NAME = re.compile(rf"\b({'|'.join((*HE, *SHE))})\b")


def renamed(question: str, answer: str, rng: random.Random) -> tuple[str, str]:
    """The problem with other names, no two of which become one."""
    there = list(dict.fromkeys(NAME.findall(f"{question}\n{answer}")))
    taken, others = set(there), dict[str, str]()
    for name in there:
        if rng.random() >= STAYS:
            others[name] = rng.choice([other for other in (HE if name in HE else SHE) if other not in taken])
            taken.add(others[name])

    def changed(text: str) -> str:
        return NAME.sub(lambda match: others.get(match[0], match[0]), text)

    return changed(question), changed(answer)
