//! Which source sends what to a destination, when several ranks hold the request.

use super::Scope;
use super::pair::{LayerFinder, check_classes, mismatch};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{HeadRange, InnerOrder, PoolLayout};

/// Which of the sources sends what to this destination: one entry per source, `None` if it has nothing to send
/// (another replica does). Each layer and head of the destination comes from exactly one source; replicas take turns
/// by the destination's rank.
///
/// # Errors
/// `GeometryMismatch` naming the field, or naming layers or heads nobody covers; `Unsupported` if one source would have
/// to send different heads in different layers of a group.
pub fn assign(sources: &[&PoolLayout], destination: &PoolLayout) -> Result<Vec<Option<Scope>>> {
    let mut shares: Vec<Share> = sources.iter().map(|_| Share::new(destination.groups())).collect();
    let mut uncovered: Vec<u16> = Vec::new();
    // Layers that look alike on all sides are assigned alike: the last one's classes, and who sends it.
    let mut last = (Vec::new(), Vec::new());
    let mut finders: Vec<LayerFinder<'_>> = sources.iter().map(|source| LayerFinder::new(source)).collect();
    for layer in 0..destination.layers().len() as u16 {
        let id = &destination.layers()[usize::from(layer)];
        let holders: Vec<(usize, u16)> = finders
            .iter_mut()
            .enumerate()
            .filter_map(|(index, finder)| Some((index, finder.find(id)?)))
            .collect();
        if holders.is_empty() {
            uncovered.push(layer);
            continue;
        }
        let mut classes = vec![(usize::MAX, destination.layer_class(layer))];
        classes.extend(
            holders
                .iter()
                .map(|&(source, at)| (source, sources[source].layer_class(at))),
        );
        if classes == last.0 {
            last.1
                .iter()
                .for_each(|&source: &usize| add_layer(&mut shares[source], layer));
            continue;
        }
        assign_layer(sources, destination, layer, &holders, &mut shares)?;
        let sends = |&source: &usize| shares[source].layers.last() == Some(&layer);
        last = (classes, (0..sources.len()).filter(sends).collect());
    }
    if !uncovered.is_empty() {
        return Err(uncovered_layers(sources, destination, &uncovered));
    }
    Ok(shares.into_iter().map(Share::finish).collect())
}

/// What one source sends so far.
struct Share {
    layers: Vec<u16>,
    heads: Vec<Option<HeadRange>>,
}

impl Share {
    fn new(groups: usize) -> Share {
        Share {
            layers: Vec::new(),
            heads: vec![None; groups],
        }
    }

    fn finish(self) -> Option<Scope> {
        if self.layers.is_empty() {
            return None;
        }
        let headed = self.heads.iter().any(Option::is_some);
        let nothing = HeadRange::new(0, 0);
        Some(Scope {
            layers: self.layers,
            heads: headed.then(|| self.heads.into_iter().map(|heads| heads.unwrap_or(nothing)).collect()),
        })
    }
}

fn assign_layer(
    sources: &[&PoolLayout],
    destination: &PoolLayout,
    layer: u16,
    holders: &[(usize, u16)],
    shares: &mut [Share],
) -> Result<()> {
    let rank = rank_of(destination, layer);
    // A layer's groups (attention, states) are assigned one by one; head-less ones follow a source that already sends
    // this layer, so that a layer costs no more sources than its heads need.
    let mut groups: Vec<u16> = destination
        .layer_planes(layer)
        .iter()
        .map(|&plane| destination.planes()[plane as usize].group)
        .collect();
    groups.sort_unstable_by_key(|&group| (destination.local_heads(usize::from(group)).is_none(), group));
    groups.dedup();
    for group in groups {
        let candidates = candidates(sources, destination, layer, group, holders)?;
        match destination.local_heads(usize::from(group)) {
            Some(needed) => assign_heads(destination, layer, group, needed, &candidates, rank, shares)?,
            None => {
                let sending = candidates
                    .iter()
                    .find(|candidate| shares[candidate.source].layers.last() == Some(&layer));
                let chosen = sending.unwrap_or(&candidates[rank % candidates.len()]);
                check_alone(destination, layer, group, chosen.source, shares)?;
                add_layer(&mut shares[chosen.source], layer);
            }
        }
    }
    Ok(())
}

/// A head-less plane is sent by every source whose scope has its layer: with heads split over several sources in the
/// same layer it would be sent more than once.
fn check_alone(destination: &PoolLayout, layer: u16, group: u16, chosen: usize, shares: &[Share]) -> Result<()> {
    let others = shares
        .iter()
        .enumerate()
        .any(|(source, share)| source != chosen && share.layers.last() == Some(&layer));
    if !others {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "head-less planes beside heads in layer {}",
            destination.layers()[usize::from(layer)]
        ),
    )
    .at(format!(
        "cache group {}",
        destination.cache_groups()[usize::from(group)].name
    ))
    .because("the layer's heads come from several sources, and each would send the head-less planes too")
    .remedy("give the head-less planes layer ids of their own"))
}

fn add_layer(share: &mut Share, layer: u16) {
    if share.layers.last() != Some(&layer) {
        share.layers.push(layer);
    }
}

/// A source that holds the layer, and which heads of the group it has.
struct Candidate {
    source: usize,
    heads: HeadRange,
}

fn candidates(
    sources: &[&PoolLayout],
    destination: &PoolLayout,
    layer: u16,
    group: u16,
    holders: &[(usize, u16)],
) -> Result<Vec<Candidate>> {
    let mut found = Vec::with_capacity(holders.len());
    for &(source, source_layer) in holders {
        let layout = sources[source];
        let source_group = matching_group(layout, source_layer, destination, layer, group)
            .map_err(|error| error.because(format!("source {source} of {} does not fit", sources.len())))?;
        found.push(Candidate {
            source,
            heads: layout.local_heads(source_group).unwrap_or(HeadRange::new(0, 1)),
        });
    }
    Ok(found)
}

/// The source's group that holds what this group of the destination needs of the layer, checked field by field.
fn matching_group(
    source: &PoolLayout,
    source_layer: u16,
    destination: &PoolLayout,
    layer: u16,
    group: u16,
) -> Result<usize> {
    let mut matched = None;
    for &plane in destination.layer_planes(layer) {
        let wanted = destination.class(destination.plane_class(plane));
        if wanted.group != group {
            continue;
        }
        let mut found = Vec::new();
        super::pair::matching_kinds(source, source_layer, destination, plane, &mut found);
        if found.is_empty() {
            return Err(mismatch(
                "planes",
                super::pair::kinds(source, source.layer_planes(source_layer)),
                match wanted.order {
                    InnerOrder::Packed if wanted.kind.is_attention() => format!("packed {}", wanted.kind),
                    _ => wanted.kind.to_string(),
                },
            )
            .at(format!("layer {}", destination.layers()[usize::from(layer)])));
        }
        for candidate in found {
            let have = source.class(source.plane_class(candidate));
            check_classes(source, have, destination, wanted)?;
            matched = Some(usize::from(have.group));
        }
    }
    matched.ok_or_else(|| Error::new(ErrorKind::Internal, "a cache group without planes in its layer"))
}

/// Tiles the needed heads with what the candidates hold, from the first head on.
fn assign_heads(
    destination: &PoolLayout,
    layer: u16,
    group: u16,
    needed: HeadRange,
    candidates: &[Candidate],
    rank: usize,
    shares: &mut [Share],
) -> Result<()> {
    let mut next = needed.start;
    while next < needed.end {
        let holding: Vec<&Candidate> = candidates
            .iter()
            .filter(|candidate| candidate.heads.start <= next && next < candidate.heads.end)
            .collect();
        if holding.is_empty() {
            let missing_end = candidates
                .iter()
                .map(|candidate| candidate.heads.start)
                .filter(|&start| start > next)
                .min()
                .unwrap_or(needed.end)
                .min(needed.end);
            return Err(Error::new(
                ErrorKind::GeometryMismatch,
                format!(
                    "heads {next}..{missing_end} of layer {}",
                    destination.layers()[usize::from(layer)]
                ),
            )
            .at(format!(
                "cache group {}",
                destination.cache_groups()[usize::from(group)].name
            ))
            .because("no source holds them")
            .remedy("name all source ranks in the claim"));
        }
        let chosen = holding[rank % holding.len()];
        let taken = HeadRange::new(next, chosen.heads.end.min(needed.end));
        let share = &mut shares[chosen.source];
        let known = &mut share.heads[usize::from(group)];
        if known.is_some_and(|known| known != taken) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "source {} sending heads {taken} of layer {} and other heads of other layers",
                    chosen.source,
                    destination.layers()[usize::from(layer)]
                ),
            )
            .because("a source sends the same heads of all its layers of a cache group")
            .remedy("let all stages of the source use one tensor-parallel size"));
        }
        *known = Some(taken);
        add_layer(share, layer);
        next = taken.end;
    }
    Ok(())
}

/// The destination's rank, by which replicas take turns.
fn rank_of(destination: &PoolLayout, layer: u16) -> usize {
    let plane = destination.layer_planes(layer)[0];
    let group = destination.planes()[plane as usize].group;
    usize::from(
        destination.cache_groups()[usize::from(group)]
            .geometry
            .sharding
            .rank()
            .0,
    )
}

fn uncovered_layers(sources: &[&PoolLayout], destination: &PoolLayout, uncovered: &[u16]) -> Error {
    const NAMED_MAX: usize = 8;
    let mut names: Vec<&str> = uncovered
        .iter()
        .take(NAMED_MAX)
        .map(|&layer| destination.layers()[usize::from(layer)].as_str())
        .collect();
    if uncovered.len() > NAMED_MAX {
        names.push("…");
    }
    Error::new(ErrorKind::GeometryMismatch, format!("layers {}", names.join(", ")))
        .because(format!(
            "none of the {} sources has {}",
            sources.len(),
            if uncovered.len() == 1 { "it" } else { "them" }
        ))
        .remedy("name all pipeline stages of the source; layers match by id")
}
