"""Moves q, k, v and o between ranks while a layer computes.

``geometry`` and ``layout`` compute the heads and tokens that each rank holds. ``in_flight`` runs a
transfer: pack, launch, wait, unpack. ``relayed`` runs a transfer in two legs, so that k and v
travel once to each node. ``exchange`` splits a transfer into two differentiable halves, for mixers.
``transport`` and ``copy_engines`` move the bytes. ``sp_group`` holds the sp group and its streams.
``check`` and ``calls`` compare the exchanges and the calls of the ranks.
"""
