"""A plan small enough to generate its kernels in a moment."""

PLAN = """\
mesh [dp=2]

func @square(%x: f32[64{dp}, 32] input "x", %w: f32[32, 48] param "w") -> (f32[64{dp}, 48]) {
  %y = aten.mm %x, %w : f32[64{dp}, 48]
  %z = aten.mul.Tensor %y, %y : f32[64{dp}, 48]
  return %z
}
"""
