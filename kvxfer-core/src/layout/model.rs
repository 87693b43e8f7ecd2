//! Layouts by model name: presets from a data file, or one's own in the same form.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DType, Geometry, HeadRange, InnerOrder, PlaneKind, PlaneSpec, PoolLayout, Sharding};
use crate::error::{Error, ErrorKind, Result};

const PRESETS: &str = include_str!("../../data/models.toml");

/// What a model keeps per token and layer, over all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// How it is asked for.
    pub name: String,
    /// Element type of the cache.
    pub dtype: DType,
    /// Its cache groups.
    #[serde(rename = "group")]
    pub groups: Vec<ModelGroup>,
}

/// A cache group of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelGroup {
    /// A label.
    pub name: String,
    /// What its blocks hold.
    pub kind: ModelKind,
    /// The layers, by number; a layer's id is its number in decimal.
    pub layers: Vec<LayerRange>,
    /// Kv heads; for states, in how many parts ranks may divide them (0: not at all).
    #[serde(default)]
    pub kv_heads: u32,
    /// Elements of a head, or of a latent row.
    #[serde(default)]
    pub head_size: u32,
    /// The same of V, where it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_head_size: Option<u32>,
    /// Tokens of the sliding window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u32>,
    /// Bytes of one layer's state, over all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_bytes: Option<u64>,
}

/// What a group's blocks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// Keys and values with heads.
    Attention,
    /// Head-less rows, the same on every rank.
    Latent,
    /// Recurrent states.
    State,
}

/// The layers `first`, `first + step`, … below `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRange {
    /// The first.
    pub first: u16,
    /// One past the last.
    pub end: u16,
    /// From one to the next.
    #[serde(default = "one")]
    pub step: u16,
}

fn one() -> u16 {
    1
}

/// How a model's planes lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arrangement {
    /// Where planes are.
    pub planes: PlaneArrangement,
    /// The order inside their blocks.
    pub order: HeadOrder,
}

/// Where planes are. All are in region 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlaneArrangement {
    /// One plane after another: K and V of each layer.
    PerLayer,
    /// One plane per layer, K and V in one block.
    Fused,
    /// One big block holds all layers of its group: cross-layer.
    BlockMajor,
    /// One plane per head, K and V apart.
    PerHead,
}

/// The order of tokens and heads inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadOrder {
    /// Token, head, dim.
    Nhd,
    /// Head, token, dim.
    Hnd,
}

impl Arrangement {
    /// K and V planes per layer, token, head, dim inside.
    pub const PER_LAYER_NHD: Arrangement = Arrangement {
        planes: PlaneArrangement::PerLayer,
        order: HeadOrder::Nhd,
    };
    /// K and V planes per layer, head, token, dim inside.
    pub const PER_LAYER_HND: Arrangement = Arrangement {
        planes: PlaneArrangement::PerLayer,
        order: HeadOrder::Hnd,
    };
    /// All layers in one big block, token, head, dim inside.
    pub const BLOCK_MAJOR_NHD: Arrangement = Arrangement {
        planes: PlaneArrangement::BlockMajor,
        order: HeadOrder::Nhd,
    };
    /// K and V in one block per layer, token, head, dim inside each.
    pub const FUSED_NHD: Arrangement = Arrangement {
        planes: PlaneArrangement::Fused,
        order: HeadOrder::Nhd,
    };
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    model: Vec<Model>,
}

impl Model {
    /// The preset of this name.
    ///
    /// # Errors
    /// `InvalidArgument` naming the presets there are.
    pub fn preset(name: &str) -> Result<Model> {
        let presets = Model::presets();
        if let Some(model) = presets.iter().find(|model| model.name.eq_ignore_ascii_case(name)) {
            return Ok(model.clone());
        }
        let names: Vec<&str> = presets.iter().map(|model| model.name.as_str()).collect();
        Err(Error::new(ErrorKind::InvalidArgument, format!("model {name:?}"))
            .because(format!("the presets are {}", names.join(", ")))
            .remedy("choose one of them, or give your own as TOML"))
    }

    /// All presets.
    pub fn presets() -> Vec<Model> {
        // The file is compiled in, and a test parses it: it cannot fail at run time.
        Model::from_toml(PRESETS).unwrap_or_default()
    }

    /// Models from text in the form of the presets' file.
    ///
    /// # Errors
    /// `InvalidArgument` with the line, for bad TOML, unknown keys, and groups that make no sense.
    pub fn from_toml(text: &str) -> Result<Vec<Model>> {
        let file: ModelFile = toml::from_str(text).map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, "a model file")
                .because(error.to_string().trim_end().replace('\n', " | "))
                .remedy("compare with the presets: [[model]] with name and dtype, then [[model.group]]")
        })?;
        for model in &file.model {
            model.check()?;
        }
        Ok(file.model)
    }

    /// The layout of one tensor-parallel rank. Groups have `blocks` blocks each of `tokens_per_block` tokens.
    ///
    /// # Errors
    /// `InvalidArgument` if heads and ranks do not divide, or a number is zero.
    pub fn layout(
        &self,
        tensor_rank: u16,
        tensor_size: u16,
        tokens_per_block: u32,
        blocks: u32,
        arrangement: Arrangement,
    ) -> Result<PoolLayout> {
        self.layout_of_layers(tensor_rank, tensor_size, tokens_per_block, blocks, arrangement, |_| {
            true
        })
    }

    /// The same for some of the layers, such as those of a pipeline stage.
    ///
    /// # Errors
    /// As [`layout`](Self::layout); also if no layer is left.
    pub fn layout_of_layers(
        &self,
        tensor_rank: u16,
        tensor_size: u16,
        tokens_per_block: u32,
        blocks: u32,
        arrangement: Arrangement,
        wanted: impl Fn(u16) -> bool,
    ) -> Result<PoolLayout> {
        self.check()?;
        if tokens_per_block == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "0 tokens per block").at(format!("model {}", self.name)));
        }
        let mut builder = PoolLayout::builder();
        let mut planes: BTreeMap<u16, Vec<PlaneSpec>> = BTreeMap::new();
        let mut base = 0u64;
        let mut number = 0u16;
        for group in &self.groups {
            let layers: Vec<u16> = group
                .layer_numbers()
                .into_iter()
                .filter(|&layer| wanted(layer))
                .collect();
            if layers.is_empty() {
                continue;
            }
            let geometry = group.geometry(self.dtype, tokens_per_block, tensor_rank, tensor_size);
            builder.group(&group.name, geometry, blocks);
            if let Some(window) = group.window {
                builder.window(number, window);
            }
            let local = geometry.sharding.local_heads(geometry.kv_heads)?;
            let made = group.planes(number, &geometry, local, arrangement);
            place(
                &mut planes,
                &mut base,
                &layers,
                &made,
                u64::from(blocks),
                arrangement.planes,
            )
            .ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, format!("{blocks} blocks"))
                    .at(format!("model {}", self.name))
                    .because("the pool's size overflows 64 bits")
            })?;
            number += 1;
        }
        for plane in planes.into_values().flatten() {
            builder.plane(plane);
        }
        builder.build()
    }

    fn check(&self) -> Result<()> {
        let refuse = |group: &ModelGroup, what: &str| {
            Err(Error::new(ErrorKind::InvalidArgument, what)
                .at(format!("model {}, group {}", self.name, group.name))
                .remedy("correct the model's entry"))
        };
        if self.groups.is_empty() {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "a model without groups").at(format!("model {}", self.name))
            );
        }
        for group in &self.groups {
            if group.layers.iter().any(|range| range.step == 0) {
                return refuse(group, "a layer range of step 0");
            }
            if group.layer_numbers().is_empty() {
                return refuse(group, "no layers");
            }
            match group.kind {
                ModelKind::Attention if group.kv_heads == 0 || group.head_size == 0 => {
                    return refuse(group, "attention without kv_heads or head_size");
                }
                ModelKind::Latent if group.head_size == 0 || group.kv_heads != 0 => {
                    return refuse(group, "a latent group needs head_size and has no kv_heads");
                }
                ModelKind::State if group.state_bytes.unwrap_or(0) == 0 || group.head_size != 0 => {
                    return refuse(group, "a state group needs state_bytes and has no head_size");
                }
                ModelKind::State
                    if group.kv_heads > 0
                        && !group.state_bytes.unwrap_or(0).is_multiple_of(u64::from(group.kv_heads)) =>
                {
                    return refuse(group, "state_bytes must divide evenly into kv_heads");
                }
                kind if kind != ModelKind::State && group.state_bytes.is_some() => {
                    return refuse(group, "state_bytes belongs to state groups");
                }
                kind if kind != ModelKind::Attention && (group.value_head_size.is_some() || group.window.is_some()) => {
                    return refuse(group, "value_head_size and window belong to attention groups");
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl ModelGroup {
    /// The layers' numbers, ascending.
    pub fn layer_numbers(&self) -> Vec<u16> {
        let mut numbers: Vec<u16> = self
            .layers
            .iter()
            .flat_map(|range| (range.first..range.end).step_by(usize::from(range.step.max(1))))
            .collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    fn geometry(&self, dtype: DType, tokens_per_block: u32, rank: u16, size: u16) -> Geometry {
        let sharding = if self.kv_heads > 0 {
            Sharding::Heads { rank, size }
        } else {
            Sharding::Replicated { rank, size }
        };
        match self.kind {
            ModelKind::Attention => {
                Geometry::attention(dtype, tokens_per_block, self.kv_heads, self.head_size, sharding)
                    .with_value_head_size(self.value_head_size.unwrap_or(self.head_size))
            }
            ModelKind::Latent => Geometry::latent(dtype, tokens_per_block, self.head_size, sharding),
            ModelKind::State => Geometry::state(self.kv_heads, sharding),
        }
    }

    /// The planes of one layer with their block lengths; the layer and the base are still to be set.
    fn planes(&self, group: u16, geometry: &Geometry, local: HeadRange, arrangement: Arrangement) -> Vec<MadePlane> {
        let order = match arrangement.order {
            HeadOrder::Nhd => InnerOrder::NHD,
            HeadOrder::Hnd => InnerOrder::HND,
        };
        let row = geometry.dtype.bytes() * u64::from(geometry.tokens_per_block);
        let bytes = |heads: u32, size: u32| row.saturating_mul(u64::from(heads)).saturating_mul(u64::from(size));
        let made = |kind, heads: Option<HeadRange>, order, block_length| MadePlane {
            group,
            kind,
            heads,
            order,
            block_length,
        };
        let (key, value) = (geometry.head_size, geometry.value_head_size);
        match (self.kind, arrangement.planes) {
            (ModelKind::Latent, _) => vec![made(PlaneKind::Latent, None, InnerOrder::ROWS, bytes(1, key))],
            (ModelKind::State, _) => {
                let whole = self.state_bytes.unwrap_or(0);
                let (heads, length) = match self.kv_heads {
                    0 => (None, whole),
                    heads => (Some(local), whole / u64::from(heads) * u64::from(local.count())),
                };
                vec![made(PlaneKind::State, heads, InnerOrder::Packed, length)]
            }
            (ModelKind::Attention, PlaneArrangement::Fused) if key == value => {
                let order = match arrangement.order {
                    HeadOrder::Nhd => InnerOrder::KV_NHD,
                    HeadOrder::Hnd => InnerOrder::KV_HND,
                };
                vec![made(
                    PlaneKind::Fused,
                    Some(local),
                    order,
                    bytes(local.count(), key).saturating_mul(2),
                )]
            }
            (ModelKind::Attention, PlaneArrangement::PerHead) => [(PlaneKind::Key, key), (PlaneKind::Value, value)]
                .into_iter()
                .flat_map(|(kind, size)| {
                    (local.start..local.end)
                        .map(move |head| made(kind, Some(HeadRange::new(head, head + 1)), order, bytes(1, size)))
                })
                .collect(),
            (ModelKind::Attention, _) => [(PlaneKind::Key, key), (PlaneKind::Value, value)]
                .into_iter()
                .map(|(kind, size)| made(kind, Some(local), order, bytes(local.count(), size)))
                .collect(),
        }
    }
}

struct MadePlane {
    group: u16,
    kind: PlaneKind,
    heads: Option<HeadRange>,
    order: InnerOrder,
    block_length: u64,
}

/// Gives the planes of a group's layers their places after `base`; `None` on overflow.
fn place(
    planes: &mut BTreeMap<u16, Vec<PlaneSpec>>,
    base: &mut u64,
    layers: &[u16],
    made: &[MadePlane],
    blocks: u64,
    arrangement: PlaneArrangement,
) -> Option<()> {
    let layer_block: u64 = made
        .iter()
        .try_fold(0u64, |sum, plane| sum.checked_add(plane.block_length))?;
    let big_block = layer_block.checked_mul(layers.len() as u64)?;
    // K and V of a fused block that cannot have a kv axis lie one behind the other in a common stride.
    let interleaved = arrangement == PlaneArrangement::Fused && made.len() > 1;
    let start = *base;
    let mut inside = 0u64;
    for &layer in layers {
        let mut in_layer = 0u64;
        for plane in made {
            let (base, stride) = match arrangement {
                PlaneArrangement::BlockMajor => (start.checked_add(inside)?, big_block),
                _ if interleaved => (
                    start
                        .checked_add((inside - in_layer).checked_mul(blocks)?)?
                        .checked_add(in_layer)?,
                    layer_block,
                ),
                _ => (start.checked_add(inside.checked_mul(blocks)?)?, plane.block_length),
            };
            let mut spec = PlaneSpec::new(plane.group, layer.to_string(), plane.kind)
                .base(base)
                .stride(stride)
                .block_length(plane.block_length)
                .order(plane.order);
            if let Some(heads) = plane.heads {
                spec = spec.heads(heads.start..heads.end);
            }
            planes.entry(layer).or_default().push(spec);
            inside = inside.checked_add(plane.block_length)?;
            in_layer += plane.block_length;
        }
    }
    *base = start.checked_add(big_block.checked_mul(blocks)?)?;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_presets_are_there_and_make_layouts() {
        let presets = Model::from_toml(PRESETS).unwrap();
        assert_eq!(presets.len(), 7);
        for model in &presets {
            for planes in [
                PlaneArrangement::PerLayer,
                PlaneArrangement::Fused,
                PlaneArrangement::BlockMajor,
                PlaneArrangement::PerHead,
            ] {
                for order in [HeadOrder::Nhd, HeadOrder::Hnd] {
                    let layout = model.layout(1, 4, 16, 10, Arrangement { planes, order }).unwrap();
                    let bytes: u64 = layout.planes().iter().map(|plane| plane.block_length * 10).sum();
                    assert_eq!(layout.region_lengths(), [bytes], "{} {planes:?}", model.name);
                }
            }
        }
    }

    #[test]
    fn llama_70b_has_the_shape_of_the_issue() {
        let layout = Model::preset("Llama-3.1-70B")
            .unwrap()
            .layout(0, 4, 16, 768, Arrangement::PER_LAYER_NHD)
            .unwrap();
        assert_eq!(layout.planes().len(), 160);
        assert!(layout.planes().iter().all(|plane| plane.block_length == 8192));
        assert_eq!(layout.region_lengths(), [160 * 768 * 8192]);
        assert_eq!(layout.layers().len(), 80);
    }

    #[test]
    fn layers_of_two_groups_come_in_model_order() {
        let layout = Model::preset("gemma-3-27b")
            .unwrap()
            .layout(0, 8, 32, 4, Arrangement::BLOCK_MAJOR_NHD)
            .unwrap();
        assert_eq!(layout.groups(), 2);
        assert_eq!(layout.cache_groups()[1].window, Some(1024));
        let expected: Vec<String> = (0..62).map(|layer| layer.to_string()).collect();
        assert_eq!(layout.layers(), expected);
        assert_eq!(layout.planes()[5 * 2].group, 0);
        assert_eq!(layout.planes()[4 * 2].group, 1);
    }

    #[test]
    fn ones_own_models_are_read_and_typos_refused() {
        let text = r#"
            [[model]]
            name = "mine"
            dtype = "f16"
            [[model.group]]
            name = "attention"
            kind = "attention"
            layers = [{ first = 0, end = 2 }]
            kv_heads = 4
            head_size = 8
            value_head_size = 4
            [[model.group]]
            name = "recurrent"
            kind = "state"
            layers = [{ first = 2, end = 3 }]
            kv_heads = 4
            state_bytes = 64
        "#;
        let models = Model::from_toml(text).unwrap();
        for planes in [PlaneArrangement::PerLayer, PlaneArrangement::Fused] {
            let layout = models[0]
                .layout(
                    0,
                    2,
                    16,
                    4,
                    Arrangement {
                        planes,
                        order: HeadOrder::Nhd,
                    },
                )
                .unwrap();
            assert_eq!(layout.planes().len(), 5);
            assert_eq!(layout.planes()[4].block_length, 32);
        }
        let error = Model::from_toml(&text.replace("kv_heads = 4", "kvheads = 4")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("kvheads"), "{error}");
        let error = Model::from_toml(&text.replace("head_size = 8", "")).unwrap_err();
        assert!(error.to_string().contains("group attention"), "{error}");
        assert!(
            Model::preset("gpt-9")
                .unwrap_err()
                .to_string()
                .contains("llama-3.1-70b")
        );
    }
}
