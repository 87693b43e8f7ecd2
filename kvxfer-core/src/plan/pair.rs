//! Which of the source's planes hold what a destination plane needs, and whether the two mean the same.

use crate::error::{Error, ErrorKind, Result};
use crate::layout::{CacheGroup, HeadRange, InnerOrder, Plane, PlaneClass, PlaneKind, PoolLayout};

/// Finds layers by id. Neighbouring layers are usually neighbours on the other side too, so that is tried first.
pub(super) struct LayerFinder<'a> {
    layout: &'a PoolLayout,
    guess: u16,
}

impl<'a> LayerFinder<'a> {
    pub(super) fn new(layout: &'a PoolLayout) -> Self {
        LayerFinder { layout, guess: 0 }
    }

    pub(super) fn find(&mut self, id: &str) -> Option<u16> {
        let guessed = self.layout.layers().get(usize::from(self.guess));
        let found = match guessed {
            Some(guessed) if guessed == id => self.guess,
            _ => self.layout.layer_index(id)?,
        };
        self.guess = found.wrapping_add(1);
        Some(found)
    }
}

/// Adds to `found` the planes of the source's layer (by number among them) that hold parts of the destination plane,
/// with the heads that may be used of each (those in `usable`, by source group, if given).
///
/// # Errors
/// `GeometryMismatch` if there are none.
pub(super) fn matching_planes(
    source: &PoolLayout,
    source_layer: u16,
    usable: Option<&[HeadRange]>,
    destination: &PoolLayout,
    plane: u32,
    heads: Option<HeadRange>,
    found: &mut Vec<(u32, Option<HeadRange>)>,
) -> Result<()> {
    let wanted = &destination.planes()[plane as usize];
    each_matching_kind(source, source_layer, destination, plane, |ordinal, have| {
        let (Some(needed), Some(mut held)) = (heads, have.heads) else {
            if heads.is_none() == have.heads.is_none() {
                found.push((ordinal, None));
            }
            return;
        };
        if let Some(usable) = usable {
            let Some(common) = held.intersect(usable[usize::from(have.group)]) else {
                return;
            };
            held = common;
        }
        if held.intersect(needed).is_some() {
            found.push((ordinal, Some(held)));
        }
    });
    if found.is_empty() {
        // Planes of the right kind without the right heads: a differing field says more than the heads do.
        let mut differing = Ok(());
        each_matching_kind(source, source_layer, destination, plane, |ordinal, _| {
            if differing.is_ok() {
                let have = source.layer_planes(source_layer)[ordinal as usize];
                let have = source.class(source.plane_class(have));
                let wanted = destination.class(destination.plane_class(plane));
                differing = check_classes(source, have, destination, wanted);
            }
        });
        differing?;
        return Err(mismatch(
            "planes",
            kinds(source, source.layer_planes(source_layer)),
            match heads {
                Some(heads) => format!("{} of heads {heads}", wanted.kind),
                None => wanted.kind.to_string(),
            },
        )
        .at(format!("layer {}", destination.layers()[usize::from(wanted.layer)])));
    }
    Ok(())
}

/// The planes of the source's layer with bytes of the destination plane's kind, whatever their heads.
pub(super) fn matching_kinds(
    source: &PoolLayout,
    source_layer: u16,
    destination: &PoolLayout,
    plane: u32,
    found: &mut Vec<u32>,
) {
    let planes = source.layer_planes(source_layer);
    each_matching_kind(source, source_layer, destination, plane, |ordinal, _| {
        found.push(planes[ordinal as usize]);
    });
}

#[inline]
fn each_matching_kind(
    source: &PoolLayout,
    source_layer: u16,
    destination: &PoolLayout,
    plane: u32,
    mut visit: impl FnMut(u32, &Plane),
) {
    let wanted = &destination.planes()[plane as usize];
    let candidates = source.layer_planes(source_layer);
    if wanted.kind.is_attention() {
        for (ordinal, &candidate) in candidates.iter().enumerate() {
            let have = &source.planes()[candidate as usize];
            if provides(have, wanted) {
                visit(ordinal as u32, have);
            }
        }
        return;
    }
    // Head-less planes and states of a layer correspond in the order in which they are declared.
    let ordinal = destination
        .layer_planes(wanted.layer)
        .iter()
        .take_while(|&&other| other != plane)
        .filter(|&&other| destination.planes()[other as usize].kind == wanted.kind)
        .count();
    let have = candidates
        .iter()
        .map(|&candidate| &source.planes()[candidate as usize])
        .enumerate();
    if let Some((ordinal, have)) = have.filter(|(_, have)| have.kind == wanted.kind).nth(ordinal) {
        visit(ordinal as u32, have);
    }
}

/// Whether a source plane holds bytes of the destination plane's kind.
fn provides(have: &Plane, wanted: &Plane) -> bool {
    if have.kind == wanted.kind {
        return true;
    }
    let fused = have.kind == PlaneKind::Fused || wanted.kind == PlaneKind::Fused;
    // Packed blocks do not come apart into K and V.
    let open = have.order != InnerOrder::Packed && wanted.order != InnerOrder::Packed;
    open && fused && have.kind.is_attention()
}

pub(super) fn kinds(layout: &PoolLayout, planes: &[u32]) -> String {
    let names: Vec<String> = planes
        .iter()
        .map(|&index| {
            let plane = &layout.planes()[index as usize];
            let packed = match plane.order {
                InnerOrder::Packed if plane.kind != PlaneKind::State => "packed ",
                _ => "",
            };
            match plane.heads {
                Some(heads) => format!("{packed}{} of heads {heads}", plane.kind),
                None => format!("{packed}{}", plane.kind),
            }
        })
        .collect();
    names.join(", ")
}

/// Checks that blocks of these classes mean the same.
///
/// # Errors
/// `GeometryMismatch` naming the field and both values.
pub(super) fn check_classes(
    source: &PoolLayout,
    have: &PlaneClass,
    destination: &PoolLayout,
    wanted: &PlaneClass,
) -> Result<()> {
    let have_group = &source.cache_groups()[usize::from(have.group)];
    let wanted_group = &destination.cache_groups()[usize::from(wanted.group)];
    let place = || {
        format!(
            "source group {}, destination group {}",
            have_group.name, wanted_group.name
        )
    };
    check_geometries(have_group, wanted_group, have.kind, wanted.kind).map_err(|e| e.at(place()))?;
    let packed = (have.order == InnerOrder::Packed, wanted.order == InnerOrder::Packed);
    if packed.0 != packed.1 {
        return Err(
            mismatch("inner order", have.order.to_string(), wanted.order.to_string())
                .at(place())
                .remedy("packed planes can only be copied to packed planes"),
        );
    }
    if !packed.0 {
        return Ok(());
    }
    let (have_tokens, wanted_tokens) = (
        have_group.geometry.tokens_per_block,
        wanted_group.geometry.tokens_per_block,
    );
    if have_tokens != wanted_tokens {
        return Err(mismatch("tokens per block", have_tokens, wanted_tokens)
            .at(place())
            .remedy("packed planes move whole blocks: use equal block sizes or declare the inner order"));
    }
    let per_head = |class: &PlaneClass| class.block_length / u64::from(class.heads.map_or(1, HeadRange::count));
    if per_head(have) != per_head(wanted) {
        let field = if have.kind == PlaneKind::State {
            "state bytes per head"
        } else {
            "bytes per head"
        };
        return Err(mismatch(field, per_head(have), per_head(wanted)).at(place()));
    }
    Ok(())
}

fn check_geometries(have: &CacheGroup, wanted: &CacheGroup, have_kind: PlaneKind, kind: PlaneKind) -> Result<()> {
    let (have, wanted) = (&have.geometry, &wanted.geometry);
    if have.dtype != wanted.dtype {
        return Err(mismatch("dtype", have.dtype, wanted.dtype));
    }
    if have.kv_heads != wanted.kv_heads {
        return Err(mismatch("kv heads", have.kv_heads, wanted.kv_heads));
    }
    // A packed block mixes K and V, so both sizes count for it; so does a fused one, whose sizes are equal.
    let both = kind == PlaneKind::Fused || have_kind == PlaneKind::Fused;
    if (kind != PlaneKind::Value || both) && have.head_size != wanted.head_size {
        return Err(mismatch("head size", have.head_size, wanted.head_size));
    }
    if (kind == PlaneKind::Value || both) && have.value_head_size != wanted.value_head_size {
        return Err(mismatch(
            "value head size",
            have.value_head_size,
            wanted.value_head_size,
        ));
    }
    Ok(())
}

pub(super) fn mismatch(field: &str, source: impl ToString, destination: impl ToString) -> Error {
    Error::new(
        ErrorKind::GeometryMismatch,
        format!(
            "{field}: source has {}, destination has {}",
            source.to_string(),
            destination.to_string()
        ),
    )
    .remedy("start both engines with the same model and cache settings")
}
