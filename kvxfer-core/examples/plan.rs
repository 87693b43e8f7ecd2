//! Prints how the cache of Llama-3.1-70B goes from four prefill ranks to one of eight decode ranks.
#![allow(clippy::print_stdout)]

use std::sync::Arc;

use kvxfer_core::Result;
use kvxfer_core::flow::PartExtent;
use kvxfer_core::layout::{Arrangement, Model, PoolLayout, Selection};
use kvxfer_core::plan::{Plan, Run, RunLimits, Scope, Target, assign};

fn main() -> Result<()> {
    let model = Model::preset("llama-3.1-70b")?;
    let arrangement = Arrangement::PER_LAYER_NHD;
    let sources: Vec<PoolLayout> = (0..4)
        .map(|rank| model.layout(rank, 4, 16, 768, arrangement))
        .collect::<Result<_>>()?;
    let references: Vec<&PoolLayout> = sources.iter().collect();
    let have: Arc<Target> = Arc::new(Selection::single(0, 40, vec![5, 6, 300]).into());
    println!(
        "{}: 40 tokens of 16 per block, prefill TP4 to decode TP8, one layer",
        model.name
    );
    for rank in 0..8 {
        let destination = Arc::new(model.layout(rank, 8, 16, 768, arrangement)?);
        println!(
            "\ndecode rank {rank} holds heads {}:",
            destination
                .local_heads(0)
                .map_or("none".into(), |heads| heads.to_string())
        );
        for (source, scope) in assign(&references, &destination)?.into_iter().enumerate() {
            let Some(scope) = scope else {
                println!("  prefill rank {source}: nothing to send");
                continue;
            };
            let plan = plan(&sources[source], &have, &destination, scope)?;
            println!("  prefill rank {source}: {} bytes", plan.bytes());
            for run in plan.runs(RunLimits::default()) {
                println!("    {}", sentence(&run));
            }
        }
    }
    Ok(())
}

/// The first layer, into blocks 10, 11 and 12.
fn plan(source: &PoolLayout, have: &Arc<Target>, destination: &Arc<PoolLayout>, scope: Scope) -> Result<Plan> {
    let wanted = Arc::new(Target::Selection {
        selection: Selection::single(0, 40, vec![10, 11, 12]),
        scope,
    });
    let first_layer = PartExtent {
        layer_end: 1,
        ..PartExtent::WHOLE
    };
    Plan::new(&Arc::new(source.clone()), have, destination, &wanted, first_layer)
}

fn sentence(run: &Run) -> String {
    let pieces = match run.count {
        1 => format!("{} bytes", run.length),
        count => format!("{count} x {} bytes", run.length),
    };
    format!(
        "{pieces} from plane {} at {} every {} to plane {} at {} every {}",
        run.source_plane,
        run.source_offset,
        run.source_stride,
        run.destination_plane,
        run.destination_offset,
        run.destination_stride
    )
}
