"""ReLU of 2 x 2 max-pooling: the way without gradient against torch's two operations."""

import pytest
import torch

from fedexp.models.pooling import pooled


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 7)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_without_gradient(size, layout):
    """Bit for bit what it is with one, NaN included."""
    x = torch.randn(3, 8, *size, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = torch.nan
    x = x.to(memory_format=layout)
    with torch.no_grad():
        actual = pooled(x)
    expected = pooled(x.requires_grad_()).detach()
    assert expected.isnan().sum() == 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
