"""Moves q, k, v and o between ranks while a layer computes.

``geometry`` and ``layout`` say which rank holds which heads of which tokens. ``in_flight`` packs,
launches, waits and unpacks; ``relayed`` does so in two legs, for k and v that travel once to each
node; ``exchange`` makes two differentiable halves of it, for mixers. ``transport`` and
``copy_engines`` move the bytes. ``sp_group`` is the sp group with its streams.
``check`` and ``calls`` compare what the ranks do.
"""
