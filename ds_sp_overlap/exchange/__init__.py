"""Moves q, k, v and o between ranks while a layer computes.

``geometry`` and ``layout`` say which rank holds which heads of which tokens. ``in_flight`` packs,
launches, waits and unpacks; ``exchange`` makes that two differentiable halves, for mixers;
``transport`` and ``copy_engines`` move the bytes. ``sp_group`` is the sp group with its streams.
``check`` and ``calls`` compare what the ranks do.
"""
