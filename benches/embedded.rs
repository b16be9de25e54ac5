//! What the layer adds to a request on the embedded backend, in detail:
//! `cargo bench -p benches --bench embedded`.

#[path = "semaphore/requests.rs"]
mod requests;

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use tower_semaphore::Semaphore;

use self::requests::{Before, Extensions, answer};

fn a_request(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let semaphore = Semaphore::in_memory();
    let mut group = criterion.benchmark_group("request");
    group.warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    for (name, before) in
        [("bare", Before::Nothing), ("tower", Before::Tower), ("tower-semaphore", Before::Ours)]
    {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|requests| {
                let requests = u32::try_from(requests).expect("not so many");
                runtime.block_on(async {
                    let began = Instant::now();
                    answer(before, Extensions::Some, requests, &semaphore).await;
                    began.elapsed()
                })
            });
        });
    }
    group.finish();
    runtime.block_on(semaphore.shutdown());
}

criterion_group!(benches, a_request);
criterion_main!(benches);
