"""A comparison of a layer's own forward with its driver leaves the layer as it was."""

from torch import nn

from ds_sp_overlap.integrations.inspect import probe


def test_dropouts_are_off_in_a_comparison_and_as_they_were_behind_it():
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval(), nn.ModuleList([nn.Dropout1d(0.1)]))
    dropouts = [part for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
    with probe._without_dropout(module):
        assert [part.training for part in dropouts] == [False] * 3
    assert [part.training for part in dropouts] == [True, False, True]
