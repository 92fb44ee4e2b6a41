"""EXAONE 3.5 for quintet: Llama's arithmetic under other names.

Its checkpoints call the parts of a decoder otherwise (`transformer.h.0.attn.attention.q_proj`), and its config.json
spells some sizes otherwise (`num_layers`). What it computes is what Llama 3 computes.
"""

from quintet.models import Family, HfConfig, ModelShape, Names, dense_shape, register


@register
class Exaone(Family):
    name = "exaone"
    architectures = ("ExaoneForCausalLM",)
    names = Names(
        embedding="transformer.wte",
        layer="transformer.h.{}",
        final_norm="transformer.ln_f",
        input_norm="ln_1",
        attention="attn.attention",
        out="out_proj",
        mlp_norm="ln_2",
        gate="c_fc_0",
        up="c_fc_1",
        down="c_proj",
    )

    def shape(self, config: HfConfig) -> ModelShape:
        usual = config.spelled(
            num_hidden_layers="num_layers",
            rms_norm_eps="layer_norm_epsilon",
            hidden_act="activation_function",
        )
        return dense_shape(usual, self.name, qk_norm=False, qkv_bias=False, tied_by_default=True)
