"""What a decode worker says about a prefill worker whose pages it cannot read."""

from decode_worker.links import how_to_agree

OURS = "fp8_e4m3, blocks of 16, 30 layers, 3 KV heads of 64, weights auto, offsets aa, layout 11"


def test_t38_the_advice_is_about_what_differs() -> None:
    offsets = how_to_agree(OURS, OURS.replace("offsets aa, layout 11", "offsets bb, layout 22"))
    assert "tandem calibrate" in offsets
    assert "--kv-codec" not in offsets
    codec = how_to_agree(OURS, OURS.replace("e4m3", "e5m2").replace("layout 11", "layout 33"))
    assert "--kv-codec" in codec
    assert "calibrate" not in codec
    weights = how_to_agree(OURS, OURS.replace("layout 11", "layout 44"))
    assert weights.startswith("the models differ")
