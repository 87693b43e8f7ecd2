//! Which of a slot's tokens and layers its parts have taken, so that no two parts share a byte.

use super::PartExtent;
use super::interval::{Coverage, IntervalSet};

/// The extents of a slot's parts: for each layer a set of tokens, neighbouring layers with the same set in one row.
#[derive(Debug)]
pub(super) struct TakenExtents {
    rows: Vec<Row>,
    // Layers whose state blocks some part has.
    states: IntervalSet,
    layers: u32,
}

#[derive(Debug, Clone)]
struct Row {
    // One past the row's last layer; the row begins where the one before it ends.
    layer_end: u32,
    tokens: IntervalSet,
}

impl TakenExtents {
    /// Nothing taken, of this many layers.
    pub(super) fn new(layers: u32) -> Self {
        let all = Row {
            layer_end: layers,
            tokens: IntervalSet::new(),
        };
        TakenExtents {
            rows: vec![all],
            states: IntervalSet::new(),
            layers,
        }
    }

    /// Whether some byte of the extent belongs to a part already.
    pub(super) fn overlaps(&self, extent: &PartExtent) -> bool {
        let (start, end) = self.layers_of(extent);
        if start >= end {
            return false;
        }
        let tokens = u64::from(extent.token_start)..u64::from(extent.token_end);
        let states = extent.states && self.states.coverage(u64::from(start)..u64::from(end)) != Coverage::None;
        let first = self.rows.partition_point(|row| row.layer_end <= start);
        let mut begin = start;
        states
            || self.rows[first..]
                .iter()
                .take_while(|row| {
                    let inside = begin < end;
                    begin = row.layer_end;
                    inside
                })
                .any(|row| row.tokens.coverage(tokens.clone()) != Coverage::None)
    }

    /// Takes the extent.
    pub(super) fn take(&mut self, extent: &PartExtent) {
        let (start, end) = self.layers_of(extent);
        if start >= end {
            return;
        }
        if extent.states {
            self.states.insert(u64::from(start)..u64::from(end));
        }
        if extent.token_start >= extent.token_end {
            return;
        }
        let first = self.split_at(start);
        let past = self.split_at(end);
        for row in &mut self.rows[first..past] {
            row.tokens
                .insert(u64::from(extent.token_start)..u64::from(extent.token_end));
        }
    }

    /// Makes a row begin at this layer. Returns its index (the number of rows, at the very end).
    fn split_at(&mut self, layer: u32) -> usize {
        let index = self.rows.partition_point(|row| row.layer_end <= layer);
        let begin = if index == 0 { 0 } else { self.rows[index - 1].layer_end };
        if layer == begin || index == self.rows.len() {
            return index;
        }
        let mut below = self.rows[index].clone();
        below.layer_end = layer;
        self.rows.insert(index, below);
        index + 1
    }

    fn layers_of(&self, extent: &PartExtent) -> (u32, u32) {
        (
            u32::from(extent.layer_start),
            u32::from(extent.layer_end).min(self.layers),
        )
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_set_of_cells(
            extents in prop::collection::vec((0u32..12, 0u32..6, 0u16..7, 0u16..5, any::<bool>()), 1..24)
        ) {
            const LAYERS: u16 = 6;
            let mut taken = TakenExtents::new(u32::from(LAYERS));
            let mut cells = BTreeSet::new();
            for (token, tokens, layer, layers, states) in extents {
                let extent = PartExtent {
                    token_start: token,
                    token_end: token + tokens,
                    layer_start: layer,
                    layer_end: layer + layers,
                    states,
                };
                let mut own = BTreeSet::new();
                for layer in layer..(layer + layers).min(LAYERS) {
                    own.extend((token..token + tokens).map(|token| (layer, Some(token))));
                    if states {
                        own.insert((layer, None));
                    }
                }
                let overlaps = !own.is_disjoint(&cells);
                prop_assert_eq!(taken.overlaps(&extent), overlaps);
                if !overlaps {
                    taken.take(&extent);
                    cells.extend(own);
                }
            }
        }
    }

    #[test]
    fn the_whole_leaves_nothing() {
        let mut taken = TakenExtents::new(80);
        taken.take(&PartExtent::WHOLE);
        assert!(taken.overlaps(&PartExtent::WHOLE));
        assert_eq!(taken.rows.len(), 1);
    }
}
