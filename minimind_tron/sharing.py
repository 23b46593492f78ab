"""Which ranks hold the same, and what each coordinate of a mesh decides: holdings put into words, for all drawings.

Every sentence comes from comparing what ranks hold, range by range; none from the degrees of the mesh.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

from minimind_tron.cut_config import CutConfig
from minimind_tron.holdings import Amount, Extent, Holding, Part, Range
from minimind_tron.topology import describe_switches

# Groups of ranks that a sentence names, and ranks of each.
NAMED_GROUPS, NAMED_RANKS = 4, 8
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def alike(holdings: Sequence[Holding], key: Callable[[Holding], Hashable]) -> list[tuple[int, ...]]:
    """The ranks in groups of those for which the key is the same, in the order of their first ones."""
    groups: dict[Hashable, list[int]] = {}
    for holding in holdings:
        groups.setdefault(key(holding), []).append(holding.rank)
    return [tuple(group) for group in groups.values()]


# Numbers in words


def span(piece: Range | None) -> str:
    """A range as first-last, both included."""
    if piece is None or piece[0] == piece[1]:
        return "none"
    return str(piece[0]) if piece[1] - piece[0] == 1 else f"{piece[0]}-{piece[1] - 1}"


def spans(pieces: Iterable[Range]) -> str:
    """Several ranges."""
    return ", ".join(map(span, pieces)) or "none"


def extent(pieces: Extent, shape: Sequence[int]) -> str:
    """What is held of a tensor: a dim that is cut as a range and its whole size, another one as its size."""
    parts = [str(size) if piece == (0, size) else f"{span(piece)} of {size}" for piece, size in zip(pieces, shape, strict=True)]
    return " x ".join(parts)


def size(count: int) -> str:
    """Bytes in a unit that suits them."""
    power = next((p for p in range(len(UNITS)) if count < 1024 ** (p + 1)), len(UNITS) - 1)
    return f"{count} B" if not power else f"{count / 1024**power:.1f} {UNITS[power]}"


def amount(held: Amount) -> str:
    """Elements, padding where there is any, and bytes."""
    padding = f" + {held.padding:,} of padding" if held.padding else ""
    return f"{held.elements:,}{padding} ({size(held.bytes)})"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks, as many as a sentence bears."""
    if len(ranks) <= NAMED_RANKS:
        return _and([str(rank) for rank in ranks])
    return f"{', '.join(map(str, ranks[: NAMED_RANKS - 2]))} ... {ranks[-1]} ({len(ranks)} ranks)"


def groups_in_words(groups: Sequence[tuple[int, ...]], what: str) -> str:
    """``ranks 0 and 4 WHAT; so do 1 and 5``: of many groups the first ones."""
    first, *others = groups
    text = f"Ranks {ranks_in_words(first)} {what}"
    named = [ranks_in_words(group) for group in others[: NAMED_GROUPS - 1]]
    left = len(others) - len(named)
    return text + "".join(f"; so do {ranks}" for ranks in named) + (f"; and so do {left} more such groups" if left else "") + "."


# Who holds the same


def _several(groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [group for group in groups if len(group) > 1]


KINDS: dict[str, Callable[[Part], Extent]] = {
    "parameters": lambda part: part.weight,
    "gradients": lambda part: part.gradient,
    "optimizer states": lambda part: part.state,
}


def _held(of: Callable[[Part], Extent]) -> Callable[[Holding], Hashable]:
    return lambda holding: tuple((part.name, of(part)) for part in holding.parts)


def sentences(config: CutConfig, holdings: Sequence[Holding]) -> list[str]:
    """Who holds the same, and who different shards of it."""
    if len(holdings) == 1:
        return ["One rank holds everything."]
    return [*_whole_shares(config, holdings), *_tied(holdings), *_kv_heads(config, holdings), *_uncut(holdings)]


def _whole_shares(config: CutConfig, holdings: Sequence[Holding]) -> list[str]:
    computed = alike(holdings, _held(lambda part: part.local))
    by_groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for kind, of in KINDS.items():
        by_groups.setdefault(tuple(alike(holdings, _held(of))), []).append(kind)
    found, cut = [], []
    for groups, kinds in by_groups.items():
        if shared := _several(list(groups)):
            found.append(groups_in_words(shared, f"hold the same {_and(kinds)}"))
        if groups != tuple(computed):
            cut += kinds
    if cut:
        which = "" if cut == list(KINDS) else " of the same parameters"
        zero = f"hold different shards of the {_and(cut)}{which} (ZeRO {config.strategy.zero})"
        found.append(groups_in_words(_several(computed), zero))
    alone = [kind for groups, kinds in by_groups.items() if not _several(list(groups)) for kind in kinds]
    if alone:
        found.append(f"No two ranks hold the same {_and(alone)}.")
    return found


def _where(holding: Holding, *without: str) -> tuple[int, ...]:
    return tuple(place for name, place in holding.coordinates if name not in without)


def _tied(holdings: Sequence[Holding]) -> list[str]:
    """The embedding on two stages, rows and all."""

    def rows(holding: Holding) -> Hashable:
        held = [(part.name, part.local) for part in holding.parts if part.kind == "embedding"]
        return (*held, _where(holding, "pp")) if held else holding.rank

    shared = _several(alike(holdings, rows))
    what = "compute with the same rows of the embedding, which the last stage uses as its head"
    return [groups_in_words(shared, what)] if shared else []


def _kv_heads(config: CutConfig, holdings: Sequence[Holding]) -> list[str]:
    heads, tp = config.model.num_key_value_heads, config.mesh.tp_size
    shared = _several(alike(holdings, lambda h: (h.kv_heads, _where(h, "tp"))))
    what = f"compute with the same kv heads, of which there are {heads} for tp {tp}"
    return [groups_in_words(shared, what)] if shared else []


def _uncut(holdings: Sequence[Holding]) -> list[str]:
    lines = _several(alike(holdings, lambda h: _where(h, "tp")))
    kinds = list(dict.fromkeys(part.kind for holding in holdings for part in holding.parts))
    whole = [kind for kind in kinds if all(part.whole for holding in holdings for part in holding.parts if part.kind == kind)]
    return [f"Whole on every rank of tp that has any: {_and(whole)}."] if lines and whole else []


# What a coordinate decides


def facts(holding: Holding) -> dict[str, str]:
    """What a rank computes with, by what it is a part of; without what it has no part of."""
    found = {
        "samples": spans(holding.samples),
        "model": ", ".join(holding.stage),
        "positions": spans(holding.positions),
        "positions outside of attention and feed-forward": spans(holding.outside),
        "heads": span(holding.heads),
        "kv heads": span(holding.kv_heads),
        "ffn columns": span(holding.columns),
    }
    return found if holding.vocab is None else {**found, "vocab rows": span(holding.vocab)}


def decided(holdings: Sequence[Holding], axis: str) -> list[tuple[int, dict[str, str]]]:
    """For every coordinate along an axis, the facts that it decides alone: its ranks agree on them, and not all ranks do."""
    by_place: dict[int, list[dict[str, str]]] = {}
    for holding in holdings:
        by_place.setdefault(holding.at(axis), []).append(facts(holding))
    names = list(dict.fromkeys(name for ranks in by_place.values() for each in ranks for name in each))

    def agreed(name: str) -> list[set[str]]:
        return [{each[name] for each in ranks if name in each} for ranks in by_place.values()]

    alone = [n for n in names if all(len(values) <= 1 for values in agreed(n)) and len(set.union(*agreed(n))) > 1]
    return [(place, {n: each[n] for n in alone for each in ranks if n in each}) for place, ranks in sorted(by_place.items())]


def title(config: CutConfig) -> str:
    """The mesh in one line."""
    ranks = config.mesh.world_size
    return f"Mesh {' x '.join(f'{name} {n}' for name, n in config.mesh.degrees.items())}: {ranks} rank{'s' * (ranks != 1)}"


def subtitle(config: CutConfig) -> str:
    """The model, the switches and the types of its numbers."""
    masters = f" with {config.master_dtype} masters" if config.master_dtype else ""
    switches = describe_switches(config.mesh, config.strategy)
    return f"{config.model.num_parameters:,} parameters in {config.compute_dtype}{masters}; {switches}"
