#![allow(clippy::print_stdout, clippy::unwrap_used)]
use kvxfer_core::flow::*;
use kvxfer_core::layout::*;
use kvxfer_core::plan::*;
use std::sync::Arc;
use std::time::Instant;
fn shuf(count: u32, pool: u32, seed: u64) -> Vec<u32> {
    let mut b: Vec<u32> = (0..pool).collect();
    let mut s = seed | 1;
    for i in (1..b.len()).rev() {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        b.swap(i, (s >> 33) as usize % (i + 1));
    }
    b.truncate(count as usize);
    b
}
fn side(r: u16, n: u16, t: u32, a: Arrangement, seed: u64) -> (Arc<PoolLayout>, Arc<Target>) {
    let l = Model::preset("llama-3.1-70b").unwrap().layout(r, n, t, 768, a).unwrap();
    (
        Arc::new(l),
        Arc::new(Selection::single(0, 2048, shuf(2048 / t, 768, seed)).into()),
    )
}
fn min(name: &str, n: usize, mut f: impl FnMut() -> usize) {
    let mut v = Vec::new();
    let mut k = 0;
    for _ in 0..n {
        let t = Instant::now();
        k = f();
        v.push(t.elapsed().as_nanos() as f64 / 1000.0);
    }
    v.sort_by(f64::total_cmp);
    println!("{name:50} min {:9.2} us  median {:9.2} us  ({k})", v[0], v[n / 2]);
}
fn main() {
    let whole = PartExtent::WHOLE;
    let s = side(0, 4, 16, Arrangement::PER_LAYER_NHD, 1);
    let d = side(0, 4, 16, Arrangement::PER_LAYER_NHD, 2);
    let mut out = Vec::with_capacity(400_000);
    min("make dst", 2000, || d.1.stream(&d.0, whole).unwrap().length() as usize);
    min("make src", 2000, || {
        source_stream(&s.0, &s.1, &d.0, &d.1, whole).unwrap().length() as usize
    });
    min("make src 1 layer", 2000, || {
        source_stream(
            &s.0,
            &s.1,
            &d.0,
            &d.1,
            PartExtent {
                layer_start: 3,
                layer_end: 4,
                ..whole
            },
        )
        .unwrap()
        .length() as usize
    });
    min("bytes", 2000, || d.1.bytes(&d.0).unwrap() as usize);
    min("assign", 500, || assign(&[&s.0], &d.0).unwrap().len());
    min("runs", 50, || {
        Plan::new(&s.0, &s.1, &d.0, &d.1, whole)
            .unwrap()
            .runs(RunLimits::default())
            .count()
    });
    let mut go = |name: &str, d: &(Arc<PoolLayout>, Arc<Target>)| {
        let st = source_stream(&s.0, &s.1, &d.0, &d.1, whole).unwrap();
        min(name, 200, || {
            let mut o = 0;
            let mut n = 0;
            while o < st.length() {
                out.clear();
                o += st.segments(o, 1 << 20, 4096, &mut out);
                n += out.len();
            }
            n
        });
    };
    go("w5 chunks", &d);
    go("tp8", &side(1, 8, 16, Arrangement::PER_LAYER_NHD, 3));
    go("tp8 hnd", &side(1, 8, 16, Arrangement::PER_LAYER_HND, 3));
    go("64", &side(0, 4, 64, Arrangement::PER_LAYER_NHD, 3));
    go("fused", &side(0, 4, 16, Arrangement::FUSED_NHD, 3));
    go("blockmajor", &side(0, 4, 16, Arrangement::BLOCK_MAJOR_NHD, 3));
    let st = source_stream(&s.0, &s.1, &d.0, &d.1, whole).unwrap();
    let mut out = Vec::with_capacity(400_000);
    min("w5 at once", 500, || {
        out.clear();
        st.segments(0, u64::MAX, usize::MAX, &mut out);
        out.len()
    });
    let m = Model::preset("llama-3.1-405b").unwrap();
    min("validate", 200, || {
        m.layout(0, 8, 16, 768, Arrangement::PER_LAYER_NHD)
            .unwrap()
            .planes()
            .len()
    });
}
