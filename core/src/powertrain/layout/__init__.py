"""Config strings: one line of text (or a plain mapping) that says which engine runs where.

    layout   = group { "+" group }                        separate groups, each on cards of its own
    group    = part { "|" part }                          colocated parts: the same cards, equal sizes
    part     = backend [ "[" name "]" ] ":" dims [ "?" option { "&" option } ] [ "via" transfer ]
    dims     = axis number { axis number }                d4t2; an axis that is not given is 1
             | "(attn:" dims "|ffn:" dims ")"             attention and expert layers laid out apart
    option   = name "=" value                             typed by the backend; '...' quotes anything, '' inside it is '

Blanks around `+ | : ? &` do not matter. Axes, limits and options are the backend's; `python`, `frozen` and `inline`
are options of every part.

World of a part: the product of the axes that multiply it (d, t, p, c). Expert layers: the cards of an engine are
divisible by p*etp*e; etp is 1 unless the backend's option `etp` or ffn's `t` says otherwise; what remains is expert
data parallel. With sections, d*t*p*e of `ffn` equals the world of `attn`, and p is the same in both.

Names: parts of one role need names as soon as there are two of them; names are unique, also against the backend of a
part without a name. Cards: groups take slots in the order written, counted from 0; colocated parts have the same slots.

Transfers: a pair is a training part and an inference part that are not frozen; where a training part is named `actor`,
it alone feeds inference (a critic's weights go nowhere). `via` behind a part names the transfer,
an installed one, of every pair that this part belongs to: behind the inference part, of all its sources; behind the
training part, of all it feeds. If both parts of a pair name one, the two must agree. Behind a frozen part, or one
without a partner, it is an error.
"""

from powertrain.layout.check import parse_layout
from powertrain.layout.parts import PART_OPTIONS, Expert, Layout, Pair, Part, Place

__all__ = ["PART_OPTIONS", "Expert", "Layout", "Pair", "Part", "Place", "parse_layout"]
