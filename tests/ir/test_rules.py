from __future__ import annotations

from math import gcd, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Op, Value
from moaic.ir.layout import PENDING, WHOLE, Layout, Mesh
from moaic.ir.ops import check_known, flops_of, kind_of, rule_of
from moaic.ir.ops import Kind
from moaic.ir.rules import Dims, Rule, Strategy, fits, parse_dims, refine, rule_from_text
from moaic.ir.types import TensorType
from moaic.ir.parser import parse

PROFILE = settings(max_examples=200, derandomize=True, database=None, deadline=None)
