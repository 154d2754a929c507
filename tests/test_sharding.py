import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from sesa_jax.policy import backbones, model, sharding

BACKBONE = dataclasses.replace(
  backbones.tiny(),
  heads=8,
  kv_heads=8,
  head_dim=8,
  tied=False,
  qk_norm=True,
  qkv_bias=True,
)


def test_the_table_knows_every_leaf_of_params_and_optimizer():
  mesh = sharding.mesh(4, 2)
  params = model.abstract_params(BACKBONE)
  state = jax.eval_shape(optax.adamw(1e-3).init, params)
  by_path = sharding.shardings(mesh, params)
  assert by_path["layers"]["q"]["kernel"].spec == P(None, "fsdp", "tensor")
  assert by_path["layers"]["o"]["kernel"].spec == P(None, "tensor", "fsdp")
  assert by_path["layers"]["k"]["bias"].spec == P(None, "tensor")
  assert by_path["head"]["embedding"].spec == P("tensor", "fsdp")
  assert by_path["norm"]["scale"].spec == P(None)
  moments = sharding.shardings(mesh, state)
  assert moments[0].mu == by_path
  assert moments[0].count.spec == P()
  assert jax.tree.structure(moments) == jax.tree.structure(state)


def test_each_device_holds_its_share():
  mesh = sharding.mesh(4, 2)
  params = jax.jit(
    model.init,
    static_argnums=0,
    out_shardings=sharding.shardings(mesh, model.abstract_params(BACKBONE)),
  )(BACKBONE, jax.random.key(0))
  whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  held = sum(
    leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params)
  )
  assert whole / 8 <= held < whole / 7


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_logits_are_those_of_one_device(shape):
  params = jax.jit(model.init, static_argnums=0)(BACKBONE, jax.random.key(0))
  ids = np.arange(64, dtype=np.int32).reshape(8, 8)
  positions = jnp.tile(jnp.arange(8), (8, 1))

  @jax.jit
  def score(params, ids):
    x = model.hidden(
      model.build(BACKBONE),
      params,
      ids,
      positions,
      jnp.ones_like(ids),
      compute_dtype=jnp.float32,
      remat=False,
    )
    return model.logits(model.build(BACKBONE), params, x)

  alone = score(params, ids)
  mesh = sharding.mesh(*shape)
  spread = jax.device_put(params, sharding.shardings(mesh, params))
  rows = jax.device_put(ids, jax.NamedSharding(mesh, P("fsdp")))
  together = score(spread, rows)
  assert len(together.sharding.device_set) == 8
  np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


def test_more_devices_than_present_is_an_error():
  with pytest.raises(ValueError, match=r"asks for 16 devices; 8 are present"):
    sharding.mesh(8, 2)
  with pytest.raises(ValueError, match="asks for 0 devices"):
    sharding.mesh(0, 1)
  assert sharding.mesh(2, 1, jax.devices()[4:]).devices[0, 0].id == 4


def test_heads_that_do_not_divide_name_the_sizes_that_would():
  sharding.check(BACKBONE, fsdp=4, tensor=8)
  few = dataclasses.replace(BACKBONE, kv_heads=4)
  with pytest.raises(ValueError, match=r"kv_heads = 4 .* would: 1, 2, 4\."):
    sharding.check(few, fsdp=1, tensor=8)
  with pytest.raises(ValueError, match=r"dim = 64 does not divide .*fsdp = 5"):
    sharding.check(BACKBONE, fsdp=5, tensor=1)
  odd = dataclasses.replace(BACKBONE, vocab_size=500)
  with pytest.raises(ValueError, match=r"vocabulary = 500 .* would: 1, 2, 4\."):
    sharding.check(odd, fsdp=1, tensor=8)
  sharding.check(dataclasses.replace(odd, vocab_multiple=128), fsdp=1, tensor=8)
  narrow = dataclasses.replace(BACKBONE, ffn=60)
  with pytest.raises(ValueError, match=r"ffn = 60 .* mesh\.tensor = 8"):
    sharding.check(narrow, fsdp=1, tensor=8)
  with pytest.raises(ValueError, match=r"over a\.b = 8"):
    sharding.check(few, fsdp=1, tensor=8, field="a.b")


def test_an_unknown_leaf_is_an_error():
  tree = {"layers": {"extra": {"kernel": jnp.ones((2, 2))}}}
  with pytest.raises(ValueError, match="layers/extra/kernel"):
    sharding.shardings(sharding.mesh(1, 1), tree)
