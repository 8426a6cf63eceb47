"""Families of models, and the folders of weights that they read."""

from __future__ import annotations

from dgraph.families.family import DIFFERENCE as DIFFERENCE
from dgraph.families.family import GROUP as GROUP
from dgraph.families.family import ChatTokenizer as ChatTokenizer
from dgraph.families.family import Embedded as Embedded
from dgraph.families.family import Exam as Exam
from dgraph.families.family import Family as Family
from dgraph.families.family import Model as Model
from dgraph.families.family import Tokenizer as Tokenizer
from dgraph.families.family import check_text as check_text
from dgraph.families.family import embedded as embedded
from dgraph.families.family import encode_part as encode_part
from dgraph.families.family import families as families
from dgraph.families.hub import CONFIG as CONFIG
from dgraph.families.loading import folder_of as folder_of
from dgraph.families.loading import load as load
from dgraph.families.loading import resolve as resolve
from dgraph.families.loading import tokenizer_of as tokenizer_of
