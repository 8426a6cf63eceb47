"""Former names of modules, importable with a warning until version 0.3.

    from dgraph.graph import Graph  # DgraphWarning: dgraph.graph is dgraph.ir.graph

The finder stands last in `sys.meta_path`, so it is asked only for a module that is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from dgraph.errors.former import tell_former

if TYPE_CHECKING:
    from importlib.abc import Loader

_BY_PACKAGE = {
    "compiler": "arguments captured=base_graph compilation conversations=prompts optimized=compiled_model phases"
    " saving",
    "engine": "engine.driver=core engine.loop=thread",
    "errors": "foreign",
    "families": "adapters architectures causal hub quantised weights",
    "ir": "aten_rules axes division=shard_propagation graph kinds=aten_kinds layers linears listed orders=row_order"
    " partial_sums readonly row_rule stored=stored_weights verify=verifier",
    "private": "early=early_start processor",
    "ranks": "groups rendezvous sharding",
    "text": "views",
    "types": "card nodes shapes texts",
    "bench": "engine.load=arrivals engine.simulate=simulate",
    "engine.io": "engine.events engine.mailbox=event_loop engine.questions=label_questions engine.served=timings"
    " engine.sinks engine.tickets engine.writer=detokenizer",
    "engine.memory": "engine.dummy=dummy_step engine.kv_cost engine.measure engine.peaks engine.prefix=prefix_cache"
    " engine.profile",
    "engine.scheduling": "engine.costs=cost_model engine.demand engine.jobs engine.policies=schedulers"
    " engine.scheduler",
    "runtime": "runtime.generation=results",
    "runtime.graphs": "runtime.cudagraph=pool runtime.mapped=pinned runtime.upload",
    "runtime.kv": "runtime.pack=packed runtime.page_tables",
    "runtime.loop": "runtime.advance=transition runtime.agree=rank_check runtime.batch runtime.offers=step_inputs"
    " runtime.rehearsal=warm_up runtime.report=step_report runtime.rule=batch_config runtime.scoring=label_scoring"
    " runtime.script=scripted_policy runtime.session runtime.transcript runtime.transitions=transition_cache",
    "runtime.sampling": "runtime.decide=sample_logits runtime.seeds=random_numbers runtime.stops",
    "runtime.state": "runtime.begin=initial runtime.block_causal runtime.canvas=bidirectional"
    " runtime.decode_state=base runtime.own_block=block_window runtime.renoised=uniform_noise"
    " runtime.rows=packed_rows runtime.two_modes=encode_denoise",
    "lowering": "lowering.fused=peephole lowering.steps=instructions",
    "ops.attention": "ops.packed_attention ops.paged_attention ops.partial_attention ops.partial_context ops.sparse"
    " ops.sparse_attention ops.sparse_draws",
    "ops.experts": "ops.block_experts ops.route",
    "ops.lm_head": "ops.lm_head_combine ops.lm_head_measured ops.lm_head_part",
    "ops.vocabulary": "ops.embedding_part ops.embedding_stored ops.vocabulary_attention ops.vocabulary_combine"
    " ops.vocabulary_part",
    "ops.collectives": "ops.all_gather ops.all_reduce",
    "ops.kv": "ops.feature_merge ops.feature_read ops.feature_take ops.feature_write ops.kv_pack ops.kv_scores"
    " ops.kv_update ops.kv_votes ops.kv_write ops.row_slots ops.scales",
    "ops.products": "ops.cpp ops.dequantise ops.dequantise_rows ops.linear ops.low_rank ops.quantise_rows"
    " ops.round_rows ops.rows_glu ops.rows_linear ops.rows_quantise ops.stored",
    "ops.rows": "ops.rms_norm ops.rope ops.rows_norm ops.rows_rope",
    "ops.selection": "ops.block_numbers ops.compact ops.compare_rows ops.drift ops.drifted ops.importance"
    " ops.keep_index ops.least_drifted ops.least_similar ops.list_kept ops.select_tokens",
}
"""Former names below dgraph by the package that the modules are in now; "=" before a name that changed."""


def _moves() -> dict[str, str]:
    found = {}
    for package, names in _BY_PACKAGE.items():
        for name in names.split():
            former, _, now = name.partition("=")
            found[f"dgraph.{former}"] = f"dgraph.{package}.{now or former.rpartition('.')[2]}"
    return found


MOVED = _moves()
"""Present names of modules by their former ones."""


class _Alias:
    """The module under its present name, which runs once."""

    def __init__(self, now: str) -> None:
        self._module = import_module(now)
        self._spec = self._module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has put the spec of the former name there


class _Finder:
    """Finder of former names. Importing its base class, of `importlib.abc`, would take as long as dgraph does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MOVED:
            return None
        tell_former(f"the module {name}", MOVED[name])
        return ModuleSpec(name, cast("Loader", _Alias(MOVED[name])))


def names_of(package: str, module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that has the former name of a module: it finds the names of that module.

    Args:
        package: the package, by its full name.
        module: the module as it is called now.
    """

    def find(name: str) -> Any:
        if name.startswith("_") or not hasattr(import_module(module), name):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        tell_former(f"{package}.{name}", f"{module}.{name}")
        return getattr(import_module(module), name)

    return find


def install() -> None:
    """Let former names of modules be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
